"""A film of several environments: pictures under text, side by side, in a file."""

import contextlib
import functools
import itertools
import math
import os
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

SUFFIXES = (".mp4", ".gif")
Show = Callable[[np.ndarray], Any]
"""Takes the next frame of a film, ``[H, W, 3]`` of uint8."""

_MARGIN = 3
_GAP = 2
_SMALLEST_FONT = 9
# There is always room for this, so that the font stays as returns grow.
_LONGEST = "return -12,345.6, step 1,000, end"


def tile(
    picture: np.ndarray, lines: Sequence[str], *, width: int, height: int
) -> np.ndarray:
    """Makes one tile: a picture under lines of text, which hide nothing of it.

    Args:
      picture: ``[H, W, 3]`` of uint8, of any size; its shape is kept.
      lines: from the top; what is too long for the tile in the smallest font is cut.
      width: of the picture in the tile, in pixels.
      height: of the picture in the tile, in pixels.

    Returns:
      ``[height + that of the text, width, 3]`` of uint8, the same for as many lines.
    """
    filter_ = Image.Resampling.LANCZOS
    image = ImageOps.pad(Image.fromarray(picture), (width, height), filter_)
    font = _fitting_font(width, height, lines)
    line_height = sum(font.getmetrics())
    sheet = Image.new("RGB", (width, height + len(lines) * line_height + _MARGIN))
    for i, line in enumerate(lines):
        ImageDraw.Draw(sheet).text((_MARGIN, i * line_height), line, "white", font)
    sheet.paste(image, (0, sheet.height - height))
    return np.asarray(sheet)


def _fitting_font(width: int, height: int, lines: Sequence[str]) -> Any:
    """The largest font in which all lines fit."""
    size = max(_SMALLEST_FONT, height // 12)
    is_wide = lambda line: _font(size).getlength(line) > width - 2 * _MARGIN
    while size > _SMALLEST_FONT and any(map(is_wide, (*lines, _LONGEST))):
        size -= 1
    return _font(size)


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def grid(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """Lays tiles of one size row by row, about as many rows as columns.

    Args:
      tiles: each ``[H, W, 3]``.

    Returns:
      One picture of even height and width, as mp4 wants it; black between the columns
      and where no tile is.
    """
    height, width, _ = tiles[0].shape
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    even = lambda size: size + size % 2
    size = even(rows * height), even(columns * (width + _GAP) - _GAP), 3
    sheet = np.zeros(size, np.uint8)
    for i, picture in enumerate(tiles):
        top, left = i // columns * height, i % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = picture
    return sheet


@contextlib.contextmanager
def writing(
    path: Path, *, width: int, height: int, fps: float, colours: int
) -> Iterator[Show]:
    """Writes a film; it appears whole, once the block ends well, or not at all.

    Args:
      path: the file, of one of `SUFFIXES`; one that is there is replaced.
      width: of its frames, even.
      height: of its frames, even.
      fps: frames a second.
      colours: of a gif.

    Yields:
      What takes the next frame, ``[height, width, 3]`` of uint8.

    Raises:
      OSError: if it cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    if path.suffix == ".gif":
        encoding = _gif(temporary, width, height, fps, colours)
    else:
        encoding = _mp4(temporary, width, height, fps)
    try:
        temporary.touch()  # What cannot be written is refused before it is filmed.
        with encoding as show:
            yield show
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"{path} was not written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _mp4(path: Path, width: int, height: int, fps: float) -> Iterator[Show]:
    """Pipes frames to the ffmpeg that imageio-ffmpeg brings."""
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-f", "rawvideo"]
    words += f"-pix_fmt rgb24 -s {width}x{height} -r {fps:.6g} -i -".split()
    words += ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20", "-f", "mp4"]
    with (
        tempfile.TemporaryFile() as said,
        # In a session of its own, as Ctrl-C is for us alone.
        subprocess.Popen(
            [*words, str(path)],
            stdin=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        ) as ffmpeg,
    ):
        assert ffmpeg.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError), ffmpeg.stdin as pipe:
                yield lambda frame: pipe.write(frame.tobytes())
            code = ffmpeg.wait()
        finally:
            ffmpeg.kill()
        said.seek(0)
        if code != 0:
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise OSError(lines[-1] if lines else f"ffmpeg ended with {code}.")


@contextlib.contextmanager
def _gif(
    path: Path, width: int, height: int, fps: float, colours: int
) -> Iterator[Show]:
    """Keeps frames until the end, as their colours must share one palette."""
    frames: list[bytes] = []
    yield lambda frame: frames.append(zlib.compress(frame.tobytes(), level=1))

    def image(packed: bytes) -> Image.Image:
        return Image.frombytes("RGB", (width, height), zlib.decompress(packed))

    some = [np.asarray(image(x)) for x in frames[:: len(frames) // 8 + 1]]
    palette = Image.fromarray(np.concatenate(some)).quantize(
        colours, method=Image.Quantize.MAXCOVERAGE, kmeans=1
    )
    first, *others = (
        image(x).quantize(palette=palette, dither=Image.Dither.NONE) for x in frames
    )
    # A gif counts in hundredths of a second; what one frame loses the next one gets.
    ends = [round(100 * i / fps) for i in range(len(frames) + 1)]
    durations = [10 * (end - start) for start, end in itertools.pairwise(ends)]
    first.save(
        path,
        format="GIF",
        save_all=True,
        append_images=others,
        duration=durations,
        loop=0,
    )

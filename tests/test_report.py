"""The report of a sweep: its numbers are numpy's, its figures legible, no boasts."""

import itertools
import re

import numpy as np
import pytest
from rliable import metrics
from scipy.stats import trim_mean

from experiments import report, results, sweep_figures, sweep_results, sweep_verdict

STEPS = 1000, 2000, 4000


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(results, "RESAMPLES", 100)


def evaluations(
    member, returns, *, env="CartPole-v1", seed=0, status="done", **settings
):
    """Rows of one member; a setting of None is empty, as in what a sweep writes."""
    steps = STEPS[: len(returns)] if len(returns) <= len(STEPS) else range(len(returns))
    about = {"member": member, "agent": settings.pop("agent", "ppo"), "env": env}
    return [
        {
            **about,
            "seed": seed,
            **settings,
            "env_steps": step,
            "return": value,
            "return_std": 1.0,
            "status": status,
        }
        for step, value in zip(steps, returns)
    ]


def grid(finals, *, names=("learning_rate",), env="CartPole-v1"):
    """Members of settings, each with the final returns of its seeds."""
    rows = []
    for values, of_seeds in finals.items():
        values = values if isinstance(values, tuple) else (values,)
        for seed, final in enumerate(of_seeds):
            member = f"{env}_{'_'.join(map(str, values))}_s{seed}"
            of_member = dict(zip(names, values, strict=True))
            returns = 0.0, final / 2, final
            rows += evaluations(member, returns, env=env, seed=seed, **of_member)
    return rows


def read(tmp_path, rows):
    results.write_csv(tmp_path / "sweep.csv", rows)
    return sweep_results.read(tmp_path / "sweep.csv")


def cells(markdown):
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_the_numbers_of_numpy(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESAMPLES", 2000)
    finals = [10.0, 200.0, 30.0, 40.0, 65.0]
    curves = np.array([[1.0, 2.0, final] for final in finals])
    rows = [
        row
        for seed, curve in enumerate(curves)
        for row in evaluations(f"m{seed}", curve, seed=seed)
    ]
    (task,) = read(tmp_path, rows).tasks
    (setting,) = task.settings
    assert setting.final.value == np.mean([30.0, 40.0, 65.0])
    iqm, low, high = results.interquartile_mean(finals)
    np.testing.assert_allclose(setting.final, [iqm, low, high], rtol=1e-12)
    areas = [(1000 * 1.5 + 2000 * (2 + final) / 2) / 3000 for final in finals]
    np.testing.assert_allclose(setting.area.value, trim_mean(areas, 0.25))
    head, _, row = cells(report.table(task))
    assert head == ["setting", "runs", "final return", "area under the curve"]
    told = [f"{iqm:.1f} [{low:.1f}, {high:.1f}]"]
    assert row[:3] == ["1", "5", *told]
    assert row[3].startswith(f"{trim_mean(areas, 0.25):.1f} [")


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 7, 8])
def test_the_interquartile_mean_is_that_of_scipy(runs):
    returns = np.random.default_rng(0).normal(size=(runs, 3))
    expected = trim_mean(returns, 0.25)
    np.testing.assert_allclose(results.iqm(returns), expected)


def test_a_curve_is_the_iqm_at_each_evaluation_of_the_runs_that_are_done(tmp_path):
    rows = [
        *evaluations("a", [1.0, 3.0, 5.0]),
        *evaluations("b", [3.0, 7.0, 9.0], seed=1),
        *evaluations("c", [100.0], seed=2, status="failed"),
    ]
    rows[1]["env_steps"] = 3000  # Half-way to the last evaluation, where b was not.
    (setting,) = read(tmp_path, rows).settings
    steps, iqm = setting.curve
    np.testing.assert_array_equal(steps, [1000, 2000, 3000, 4000])
    np.testing.assert_allclose(iqm.value, [2.0, 4.5, 5.5, 7.0])
    assert (iqm.low <= iqm.value).all()
    assert (iqm.value <= iqm.high).all()


def test_runs_that_were_stopped_have_a_curve_and_no_final_return(tmp_path):
    rows = [
        *evaluations("a", [1.0, 3.0], status="stopped"),
        *evaluations("b", [3.0, 7.0], seed=1, status="stopped"),
    ]
    task = read(tmp_path, rows).tasks[0]
    np.testing.assert_allclose(task.settings[0].curve[1].value, [2.0, 5.0])
    assert task.settings[0].final is None
    assert "0, 2 stopped" in report.table(task)


def test_settings_are_ordered_by_the_iqm_of_their_final_returns(tmp_path):
    finals = {
        0.1: [10.0, 10.0, 10.0, 900.0],  # The largest mean.
        0.2: [30.0, 31.0, 32.0, 33.0],
        0.3: [20.0, 20.0, 20.0, 20.0],
    }
    rows = evaluations("r", [500.0], learning_rate=0.4, status="running") + grid(finals)
    (task,) = read(tmp_path, rows).tasks
    order = [setting.values["learning_rate"] for setting in task.settings]
    assert order == ["0.2", "0.3", "0.1", "0.4"]
    table = cells(report.table(task))
    assert [row[1] for row in table[2:]] == order
    assert table[-1][2:] == ["0, 1 running", "", "", ""]


def test_of_settings_that_end_alike_what_failed_less_and_learned_sooner_is_first(
    tmp_path,
):
    rows = [
        *evaluations("a", [1.0, 8.0, 9.0], clip=0.1),
        *evaluations("b", [1.0], clip=0.1, seed=1, status="failed"),
        *evaluations("c", [1.0, 2.0, 9.0], clip=0.2),
        *evaluations("d", [1.0, 3.0, 9.0], clip=0.3),
        *evaluations("e", [1.0, 3.0, 8.0], clip=0.4),
    ]
    (task,) = read(tmp_path, rows).tasks
    order = [setting.values["clip"] for setting in task.settings]
    assert order == ["0.3", "0.2", "0.1", "0.4"]
    assert "Setting 1 (clip=0.3) ends highest" in sweep_verdict.verdict(task)
    assert "9.000, as do settings 2 and 3; of equals" in sweep_verdict.verdict(task)


def test_a_failed_member_is_told_with_its_step_and_left_out_of_the_numbers(tmp_path):
    unevaluated = evaluations("none", [1.0], seed=2, status="failed", clip=0.1)
    unevaluated[0].update({"env_steps": "", "return": ""})
    rows = [
        *evaluations("good", [1.0, 2.0, 3.0], clip=0.1),
        *evaluations("early", [1.0, 99.0], seed=1, status="failed", clip=0.1),
        *unevaluated,
        *evaluations("nan", [1.0, 2.0, np.nan], status="done", clip=0.2),
    ]
    sweep = read(tmp_path, rows)
    (task,) = sweep.tasks
    assert task.settings[0].final == (3.0, None, None)
    assert task.settings[1].final is None
    page = report.write(tmp_path).read_text()
    part = page[page.index("## Runs that failed") : page.index("## CartPole-v1")]
    assert cells(part)[2:] == [
        ["early", "CartPole-v1", "1: clip=0.1", "1", "2,000 env steps"],
        ["none", "CartPole-v1", "1: clip=0.1", "2", "none"],
        ["nan", "CartPole-v1", "2: clip=0.2", "0", "4,000 env steps"],
    ]
    assert "Of setting 1, runs failed" in page
    assert "Without a run that is done: setting 2." in page
    assert "members: 4 (1 done, 3 failed, 0 stopped, 0 running)" in page


def test_a_member_that_was_evaluated_again_after_a_resume_counts_the_later(tmp_path):
    first, again = evaluations("a", [1.0, 2.0]), evaluations("a", [5.0, 7.0])
    (setting,) = read(tmp_path, [*first, *again]).settings
    np.testing.assert_array_equal(setting.runs[0].returns, [5.0, 7.0])


def test_one_seed_has_no_interval_and_the_page_says_so(tmp_path):
    read(tmp_path, grid({0.1: [10.0], 0.2: [20.0], 0.3: [15.0]}))
    page = report.write(tmp_path).read_text()
    assert "1 run, which has no interval: 20.0." in page
    assert "Nothing can be said of how these compare with setting 1" in page
    assert "settings 2 and 3." in page
    assert "Told apart" not in page
    assert "Performance profiles: not drawn" in page
    assert "Probability of improvement: not drawn" in page
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    expected = [f"{name}_CartPole-v1.png" for name in ("curves", "effects", "final")]
    assert drawn == expected
    assert re.findall(r"\]\((.*)\)", page) == [expected[0], expected[2], expected[1]]


def test_of_many_settings_the_best_eight_are_named_and_the_rest_is_grey(tmp_path):
    finals = {(k / 1000, 0.5 + k): [float(k)] for k in range(1, 46)}
    (task,) = read(
        tmp_path, grid(finals, names=("learning_rate", "clip_epsilon"))
    ).tasks
    axes = sweep_figures.draw_curves(task).axes[0]
    named = [line for line in axes.lines if line.get_label()[0].isdigit()]
    assert [line.get_label()[:2] for line in named] == [f"{n}:" for n in range(1, 9)]
    assert [line.get_ydata()[-1] for line in named] == [45.0 - n for n in range(8)]
    looks = {(line.get_color(), line.get_linestyle()) for line in named}
    assert len(looks) == 8
    grey = [line for line in axes.lines if line.get_color() == sweep_figures.GREY]
    assert sum(len(line.get_xdata()) > 0 for line in grey) == 37
    assert "the other 37" in [line.get_label() for line in grey]
    assert all(line.get_linewidth() < named[0].get_linewidth() for line in grey)
    table = report.table(task)
    assert len(cells(table)) == 42
    assert "The CSV has 5 more settings." in table


def test_the_probability_of_improvement_is_that_of_rliable():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 6).astype(float), rng.integers(0, 4, 4).astype(float)
    expected = metrics.probability_of_improvement(x[:, None], y[:, None])
    found = sweep_results.improvement(x, y)
    np.testing.assert_allclose(found.value, expected)
    assert 0 <= found.low < found.value < found.high <= 1
    assert sweep_results.improvement(x, y[:1]) is None


def test_a_profile_is_the_share_of_runs_above_each_threshold():
    share = sweep_results.profile(
        np.array([1.0, 2.0, 2.0, 4.0]), np.array([0, 2, 3, 4])
    )
    np.testing.assert_array_equal(share.value, [1.0, 0.25, 0.25, 0.0])
    np.testing.assert_array_equal([share.low[0], share.high[-1]], [1.0, 0.0])
    assert share.low[1] == 0.0 < share.high[1]


def test_intervals_are_the_same_each_time_and_leave_numpys_generator_alone():
    runs = np.sqrt(np.arange(17.0))
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.random(2)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    first = sweep_results.estimate(runs)
    np.testing.assert_array_equal(np.random.random(2), expected)  # noqa: NPY002
    assert sweep_results.estimate(runs) == first


@pytest.mark.parametrize(
    ("first", "other", "kind"),
    [
        ([8.0, 9.0, 9.5, 9.9], [1.0, 2.0, 3.0, 4.0], "both"),
        ([8.0, 9.0, 9.5], [1.0, 2.0, 3.0, 4.0], "few"),  # By chance 2 of 35 times.
        ([4.0, 5.0, 6.0, 7.0], [3.0, 4.5, 6.0, 6.5], "neither"),
        ([3.0] * 9 + [4.0] * 8, [3.0] * 17, "probability"),
        ([8.0, 9.0], [1.0], "single"),
    ],
)
def test_no_more_is_told_apart_than_intervals_and_the_number_of_runs_allow(
    tmp_path, first, other, kind
):
    (task,) = read(tmp_path, grid({1: first, 2: other})).tasks
    assert task.settings[0].values["learning_rate"] == "1"
    assert sweep_verdict.compare(task, 2) == kind
    said = sweep_verdict.verdict(task)
    assert sweep_verdict.KINDS[kind].format("setting 2") in said
    assert ("Told apart" in said) == (kind == "both")
    assert ("fewer than 6 runs" in said) == (
        1 < min(len(first), len(other)) < 6 or kind == "single"
    )


def test_the_page_says_what_was_run_and_what_varied(tmp_path):
    rows = [
        *grid(
            {(1e-4, None): [1.0], (1e-2, 0.01): [2.0]}, names=("learning_rate", "kl")
        ),
        *grid({(1e-3, 0.01): [3.0]}, names=("learning_rate", "kl"), env="Pong/v5"),
    ]
    read(tmp_path, rows)
    path = report.write(tmp_path)
    page = path.read_text()
    assert path == tmp_path / "report.md"
    assert f"```bash\n{results.command()}\n```" in page
    for expected in (
        "# A sweep on CartPole-v1, Pong/v5",
        "- commit: ",
        "numpy " + np.__version__,
        "- `learning_rate`: 0.0001, 0.001, 0.01",
        "- `kl`: 0.01, none",
        "- seeds: 0",
        "- members: 3 (3 done, 0 failed, 0 stopped, 0 running)",
        "## CartPole-v1\n\nSetting 1 (learning_rate=0.01, kl=0.01) ends highest",
        "## Pong/v5\n\nOne setting, with 1 run, which has no interval: 3.000.",
    ):
        assert expected in page
    assert (tmp_path / "final_Pong_v5.png").exists()


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_sweep_of_which_nothing_is_done_is_reported_as_far_as_it_is(tmp_path, status):
    rows = evaluations("a", [1.0, 2.0], status=status, clip=0.1)
    rows += evaluations("b", [1.0], status=status, clip=0.2)
    read(tmp_path, rows)
    page = report.write(tmp_path).read_text()
    assert "No run is done yet: nothing can be compared." in page
    assert "Final return: not drawn, as no run is done yet." in page
    assert re.findall(r"\]\((.*)\)", page) == ["curves_CartPole-v1.png"]


def test_no_curve_is_drawn_where_nothing_was_evaluated(tmp_path):
    rows = evaluations("a", [1.0], status="failed")
    rows[0].update({"env_steps": "", "return": ""})
    (task,) = read(tmp_path, rows).tasks
    assert all(draw(task) is None for draw in sweep_figures.DRAWINGS.values())


def test_figures_name_their_axes_and_keep_all_words_within(tmp_path):
    values = itertools.product((1e-4, 3e-4, 3e-3), (0.1, 0.2))
    finals = {v: [k + 1000.0, k + 1500.0] for k, v in enumerate(values)}
    rows = grid(finals, names=("learning_rate", "clip_epsilon"))
    rows[-1]["status"] = "failed"
    (task,) = read(tmp_path, rows).tasks
    labels = {}
    for name, draw in sweep_figures.DRAWINGS.items():
        figure = draw(task)
        figure.draw_without_rendering()
        words, page = figure.get_tightbbox(), figure.get_size_inches()
        assert min(words.x0, words.y0) >= 0, name
        assert words.x1 <= page[0], name
        assert words.y1 <= page[1], name
        for axes, legend in itertools.product(figure.axes, figure.legends):
            assert not axes.get_tightbbox().overlaps(legend.get_window_extent()), name
        labels[name] = [(a.get_xlabel(), a.get_ylabel()) for a in figure.axes]
    interval = "IQM, 95 % interval"
    assert labels == {
        "curves": [("thousand env steps", f"return: {interval}")],
        "final": [(f"final return: {interval}", "")],
        "profiles": [
            (r"final return $\tau$", r"share of runs above $\tau$, 95 % interval")
        ],
        "improvement": [("probability of improvement, 95 % interval", "")],
        "effects": [("learning_rate", "final return"), ("clip_epsilon", "")],
    }
    rows = [
        label.get_text()
        for label in sweep_figures.draw_final(task).axes[0].get_yticklabels()
    ]
    assert rows[0] == "1: learning_rate=0.003, clip_epsilon=0.1"


def test_the_effect_of_a_number_is_drawn_by_run_and_by_value(tmp_path):
    finals = {
        (1e-4, 0.9, None, "tanh"): [1.0, 2.0, 3.0, 9.0],
        (3e-3, 0.99, 64, "relu"): [4.0, 5.0],
        (3e-3, 0.99, 128, "relu"): [6.0, 7.0],
    }
    names = "learning_rate", "gae_lambda", "minibatch_size", "activation"
    (task,) = read(tmp_path, grid(finals, names=names)).tasks
    assert task.numeric == list(names[:3])
    figure = sweep_figures.draw_effects(task)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xscale() for axes in panels] == ["log", "linear", "linear"]
    runs, of_values = panels[0].lines
    assert sorted(runs.get_ydata()) == [1, 2, 3, 4, 5, 6, 7, 9]
    np.testing.assert_array_equal(of_values.get_xydata(), [[1e-4, 2.5], [3e-3, 5.5]])
    assert panels[2].get_xlabel().endswith("(runs that have none, not shown: 4)")


def test_values_at_which_runs_failed_are_crossed(tmp_path):
    rows = grid({0.1: [1.0, 2.0], 0.2: [3.0, 4.0]})
    rows += evaluations("f", [1.0], learning_rate=0.3, status="failed")
    (task,) = read(tmp_path, rows).tasks
    lines = {
        line.get_label(): line
        for line in sweep_figures.draw_effects(task).axes[0].lines
    }
    crosses = lines[sweep_figures.FAILED]
    np.testing.assert_array_equal(crosses.get_xdata(), [0.3])
    assert crosses.get_marker() == "x"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("0.000123456", "0.000123"),
        ("1e-4", "0.0001"),
        ("4096", "4096"),
        ("", "none"),
        ("tanh", "tanh"),
    ],
)
def test_a_value_is_told_shortly(value, told):
    assert sweep_figures.short(value) == told


GOOD = "member,agent,env,seed,env_steps,return,return_std,status\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["sweep.csv is not there"]),
        ("", ["sweep.csv has no rows"]),
        (f"# command: x\n{GOOD}", ["sweep.csv has no rows"]),
        ("member,env,seed,return,status\na,b,0,1,done\n", ["lacks agent, env_steps"]),
        (
            f"{GOOD}a,ppo,b,0,1,2,3,lost\n",
            ["row 1", "'lost'", "done, failed, stopped, running"],
        ),
        (f"{GOOD}a,ppo,b,0,1,high,3,done\n", ["return 'high' must be a number"]),
        (f"{GOOD}a,ppo,b,0,-1,2,3,done\n", ["env_steps '-1'", "at least 0"]),
        (f"{GOOD}a,ppo,b,0,1,2,3,done\na,ppo\n", ["row 2", "as many fields"]),
        (f"{GOOD}a,ppo,b,0,1,2,3,done,4\n", ["row 1", "as many fields"]),
    ],
)
def test_what_is_no_sweep_is_refused_in_one_line(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "sweep.csv").write_text(text)
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words), said
    assert not (tmp_path / "report.md").exists()


def test_the_command_writes_the_report_and_prints_where(tmp_path, capsys):
    read(tmp_path, grid({1: [1.0]}))
    assert report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.md'}\n"
    assert not list(tmp_path.glob("*.tmp"))

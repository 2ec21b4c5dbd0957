"""The only impure room: threads, devices, disk, clock."""

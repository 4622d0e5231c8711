"""The checks of `aionn doctor`: small functions that look at one thing each, and return rows.

    row              a row: ok, warn or fail, with what was found, what is needed and the way out
    kernel           the kernel's version, and its calls by trying them: pidfds, memfds, eventfds, futexes, parent death signals
    sandbox          what the kernel has to confine drivers with, and what confines each driver that was tried
    machine          clocks, frequency governor, huge pages, pressure; open files and address space; CPU quotas and memory of the cgroups
    engines          every installed engine, with a small model in a real driver process
    folders          the state directory and caches: owner, mode, space, file system, databases
    processes        drivers without an app, other releases of aionn, other time namespaces
    leavings         what `--fix` removes: leavings of aionn, and nothing else

A check takes the directory of /proc, /sys and the cgroup mounts as `root` where it only reads files, so that tests can lay out another
machine. A check leaves nothing behind. Only `leavings` changes something.
"""

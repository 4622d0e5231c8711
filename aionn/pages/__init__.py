"""Statistics pages: what a process is doing, in shared memory that another process reads without a message.

    layout      where each number of a driver's page lies, and what it means (sans-IO)
    app_layout  the same for an app's page and for trace records (sans-IO)
    page        a driver's page as its process writes it and as its app reads it; maps memory
    app_page    the app's page: slots given out and taken back
    finding     pages and trace rings of other processes, found by the links in /proc
    record_reader  trace records of an app and its drivers, collected
    totals      what pages show as numbers with names and labels, for monitoring, and sums of these over pages that come and go
    process_use what /proc says of a process: parent, memory, CPU time, threads, descriptors
    trace_records  what trace records mean (sans-IO)
    _page       native: the slots (_slots.c), and what a reader does in one step (_page.c); slot_objects.h has what they share.
                The words of slots and rings are in the headers of `aionn.hal`

A page is one sealed memfd of 2 MiB, of which a process touches only what it uses. The page has no name in a file system, so it
vanishes with its last descriptor. An app has one page for all its runtimes. A driver makes a page and sends its descriptor with `Ready`.

    header      magic, layout version, role, pid, start time (field 22 of /proc/PID/stat), sizes, until when frames are traced
    activity    driver: heartbeat of the loop; how many loads and compiles have begun and ended, and since when
    slots       driver: one per prepared model: executions begun and finished, since when, when the last one ended, a histogram
                app: one per runtime, device, compilation and burst: names, counters, histograms of call and service time

Only the driver itself can write to its page, because apps share drivers. What others write lies in a second memfd with the same header:
until when a driver writes trace records, and the stacks of all threads, as `faulthandler` writes them when it is asked by a signal.

Each number has one writer at a time and is stored whole. A reader may see one number of this moment beside another of the next, so a
reader that draws conclusions looks twice. A later version of the layout may add numbers in the unused room behind those of today.
"""

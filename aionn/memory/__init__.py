"""Memory: bytes that cross the process border without a copy, and bytes that stay in a driver.

    limits           how much memory is still available, and which limit says so
    descriptors      whether a descriptor from another process may be mapped
    region           one piece of shared memory, mapped; beside `aionn.pages`, the only place that maps memory
    memory           `Memory`: what an app holds and slices
    hardware_buffer  `HardwareBuffer`: images, their planes and strides, as tensors
    pool             the frames of a burst that have one size
    requests         whether a request may touch the bytes it names; pure
    domain           for which uses a buffer may live in a driver, and its dimensions; pure
    device_buffer    one such buffer: its memory, its state and copies of it; pure
    device_buffers   the registry of device buffers, and the requests that name them; pure

Design
    One mapping per memory, shared by all slices of it and released with the last user. Nothing has a name in
    /dev/shm: memory is a memfd, so the kernel frees it with its last descriptor and mapping.
    An allocation that succeeds has its memory. First the limits of cgroups, resources and the machine are asked, then
    the pages are reserved. `limits` may allow by what it read up to 0.1 s ago, and refuses only by what it reads now. Too
    little memory is a `MemoryAllocationError` that names both sizes. It never becomes a SIGBUS or a killed process later.
    A descriptor from another process is checked before it is mapped, and a request before its bytes are touched. Sizes
    are sealed, sums cannot wrap, and an output overlaps nothing.
    Errors have two phases. A request of the wrong shape is a `CallerError` (INVALID_ARGUMENT), raised before anything
    is mapped. A failure to map after that is a `MappingError` (GENERAL_FAILURE).

Drivers do without `hardware_buffer`.
"""

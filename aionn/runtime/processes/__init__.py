"""Driver processes: started, watched, ended, started again. Only `spawning` starts processes.

devices   `Device` and `Devices`: which devices a runtime has, and the driver process of each
process   `DriverProcess`: one driver process and the connection to it
early     drivers that start when the runtime opens
child     a child process, signalled and waited for through its pidfd
output    what a driver process prints, on its way to the app's stderr
spawning  `posix_spawn` of a driver
template  the process that copies itself to drivers, asked for one more
surroundings  the environment of a driver, and the arguments of `Runtime` about it and the sandbox
liveness  whether a driver hangs or is busy, judged by its statistics page
restarts  how long to wait before a driver that keeps dying is started again
"""

"""Driver processes: started, watched, ended, started again. Only `spawning`, `starter` and its program start processes.

devices   `Device` and `Devices`: which devices a runtime has, and the driver process of each
process   `DriverProcess`: one driver process and the connection to it, and how long to wait before one that keeps dying is started again
handed    drivers of a service, to which an app is handed connections, and what the service digests of models
child     a child process, signalled and waited for through its pidfd, and what it prints, on its way to the app's stderr
spawning  `posix_spawn` of a driver, also before the app imports what it needs; the arguments of `Runtime` about it
environment  of a driver: what it may know of the app's
starter   starts drivers for a service that is confined; starter_program is the process that can
template  the process that copies itself to drivers, asked for one more
liveness  whether a driver hangs or is busy, judged by its statistics page
"""

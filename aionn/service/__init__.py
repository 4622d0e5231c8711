"""One service for all apps of a user: it owns drivers, and hands apps connections to them (`aionn serve`).

    listening    the socket on which the service listens: made, inherited from systemd, or taken over from another service
    drivers      the drivers of a service, by the settings that apps ask for
    models       those that the service prepares for clients without an event loop, and digests of models for other apps
    quarantine   models that end their drivers again and again
    confinement  what the service gives away before it accepts an app
    units        what systemd needs to start the service at the first connection
    server       `Service`: the apps that are attached, and the drivers for each of their settings

An app's `Runtime(service=)` asks the service for a driver and then speaks with the driver itself. So no frame passes the service, and of a
model only open descriptors do. The service's end interrupts no stream. `remote.attaching` has the app's way to the socket,
`runtime.processes.handed` what an app does with a driver that is not its own, and `driver.service` what a driver does for guests.
"""

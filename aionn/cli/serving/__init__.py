"""Commands that serve other programs until a signal.

http       `aionn serve-http`
frigate    `aionn serve-frigate`
wyoming    `aionn serve-wyoming`
listening  the TCP socket of such a command, and its end by SIGTERM
"""

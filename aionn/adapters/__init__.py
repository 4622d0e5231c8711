"""Clients and servers for systems that exist already: Frigate, Home Assistant, LiveKit agents and Pipecat.

    frigate     `aionn serve-frigate`, a server for Frigate's detectors
    wyoming     `aionn serve-wyoming`, a server for Home Assistant and its satellites
    livekit     `AionnInferenceExecutor`, the models of a LiveKit job
    pipecat     `AionnVADAnalyzer`, voice activity detection for Pipecat

Each adapter needs an extra of the same name. No other module imports the package of that system, and this one imports nothing.
"""

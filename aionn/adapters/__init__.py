"""Clients and servers for systems that exist already: Frigate, Home Assistant, LiveKit agents and Pipecat.

Each adapter has an extra of its own, and is the only module that imports the package of its system. This module imports nothing.
"""

"""Wake words and voice activity for Wyoming, the protocol of Home Assistant's voice satellites. Extra: aionn[wyoming].

    events      one event from a connection, with limits on every length that a client announces
    models      a model in a driver, with one burst for all satellites
    wake_words  openWakeWord: sound -> spectrogram -> embedding -> the score of each word
    voice       Silero VAD: where speech begins and ends
    opening     which file is which model
    server      the conversation with one satellite, and all of them

A satellite's state is kept here and not in a driver: half a second of sound, a spectrogram and some embeddings. So a driver's death costs
a stream nothing but time, and a satellite that stalls costs 80 KB. The three models of a wake word run one after the other over bursts to
one driver. The step between two of them is a small array operation on the state, which is done here.
"""

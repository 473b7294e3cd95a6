"""Other people's trainers and formats: each translates to the protocol, and none is needed to import loopscope."""

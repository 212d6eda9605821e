"""Stand-ins for inference engines: their interfaces, and as little behind them as a layer needs.

Written from the engines' public signatures. `install` puts one in place of the engine's modules.
"""

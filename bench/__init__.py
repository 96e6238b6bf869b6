"""Programs that run DSA on real input and measure it; each is started as `python -m bench.NAME`."""

"""The viewer in the browser: slides of runs, what their models look at, and why.

- :mod:`psamil.serve.app` answers requests, :mod:`psamil.serve.guard` refuses those that it should not answer.
- :mod:`psamil.serve.study` knows runs and slides; :mod:`psamil.serve.explained` asks models about them.
- :mod:`psamil.serve.overlay` packs what a model says about tiles, :mod:`psamil.serve.pictures` reads the slides.

It reads, and never writes. ``static`` holds the page.
"""

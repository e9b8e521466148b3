"""The report: pure functions from a diagnosis to words.

`headline.headline` writes the one sentence, `text.render_text` the terminal report. Neither reads a
clock, a file or the environment. The headline needs no terminal library, so JSON output stays fast.
"""

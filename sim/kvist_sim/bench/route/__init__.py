"""``kvist bench route``: routing policies against each other, in virtual time.

- ``command``: runs the cells that the options ask for and prints the table.
- ``disaggregation``: the table of disaggregation in docs/benchmarks.md.
- ``page``: the section of docs/benchmarks.md.
- ``pictures``: which curves the pictures of that section show.
- ``plots``: draws a picture with matplotlib.
- ``svg``: compact SVG, one file for light and dark pages.
"""

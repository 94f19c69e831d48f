"""Configuration of other routers, translated to the settings of this picker.

- ``llmd``: llm-d's flags and configuration file.
"""

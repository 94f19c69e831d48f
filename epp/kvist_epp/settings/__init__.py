"""The picker's settings: every flag, to and from the command line and the environment. Standard library only.

The operator renders the picker's arguments with this package, and reads its own flags with ``arguments``.

- ``settings``: the settings object, with the flag, default and help of each field.
- ``arguments``: reads the fields of a settings object from argv and the environment; writes argv.
- ``validation``: checks the values and parses the flags that hold lists.
"""

"""Programs from the picker's image that run beside an engine or before it; the picker imports none of them.

They need only the standard library, and ``model_download`` the hub's client.

- ``disk_cleaner``: keeps the disk tier of an engine below the size of its volume.
- ``block_files``: the walk through the files of a disk tier, and which were used least recently.
- ``disk_growth``: growth of a folder between two walks, by the use of its file system.
- ``model_download``: fills a cache with the files of models.
"""

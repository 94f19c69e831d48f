"""Warm hand-over: hot beginnings of prompts are computed where they will be missed, before requests come.

``plan`` decides what is asked of whom next, ``sender`` asks, ``keeper`` does it all the time.
"""

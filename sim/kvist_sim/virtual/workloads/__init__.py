"""Kinds of traffic and fleets, by name: ``cases.CASES``.

- ``cases``: the rows of the table, traffic and fleet together.
- ``dialogues``: sessions of several turns: chats, agents, questions about a document, code completion.
- ``prefixes``: single requests: system prompts, groups, a hot prefix, nothing shared, bursts of one prompt.
- ``mooncake``: trace files in Mooncake's format.
"""

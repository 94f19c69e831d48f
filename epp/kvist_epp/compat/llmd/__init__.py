"""The picker in place of llm-d's router: its command line and its configuration file, told as our flags.

What has a counterpart is translated, what has none is named with what happens instead, and what nobody knows
stays where it is, for our own reader to refuse. Flags: llm-d-router v0.10 (``pkg/epp/server/options.go``);
the file: ``EndpointPickerConfig`` of ``llm-d.ai/v1alpha1``. `translated` is the only verb.
"""

from .flags import Translated, translated

__all__ = ["Translated", "translated"]

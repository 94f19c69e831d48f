"""Accept llm-d's command line and configuration file, translated to kvist-epp's flags.

A setting with a counterpart is translated; one without is named with what happens instead; an unknown one is
kept for the flag parser to reject. Sources: llm-d-router v0.10 (``pkg/epp/server/options.go``) and
``EndpointPickerConfig`` of ``llm-d.ai/v1alpha1``. ``translated`` is the only entry point.

- ``flags``: translates llm-d's flags.
- ``config``: translates llm-d's configuration file.
"""

from .flags import Translated, translated

__all__ = ["Translated", "translated"]

"""Property tests judge what comes out, not how long an example took on a busy machine (pytest-timeout bounds that)."""

from hypothesis import settings

settings.register_profile("agentreach", deadline=None)
settings.load_profile("agentreach")

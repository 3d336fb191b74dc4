"""Why a request left for where it went or waited, kept cheaply while nobody asks for it."""

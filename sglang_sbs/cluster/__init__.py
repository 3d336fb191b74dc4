"""A PD cluster on this machine: planned, started, watched, stopped. All of it: ``local``. Knows
SGLang's command line and HTTP interface only; imports neither torch nor SGLang."""

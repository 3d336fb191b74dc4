"""Small patches for releases that cannot be extended otherwise: ``sglang-sbs patch``.

SGLang before 0.5.11 loads no plugins, and ``sglang_router`` 0.3.2 has a closed list of policies: a
patch adds the one call that lets this package in. The patches are the files in ``patches/``; a
wheel has them in here. Nothing here imports SGLang: an environment is read as files."""

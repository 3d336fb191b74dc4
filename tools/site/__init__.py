"""The documentation as a site: the hook of ``mkdocs.yml``."""

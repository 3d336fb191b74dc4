"""The paper's decode experiment (section 5.2.2): only the choice of decode ranks differs."""

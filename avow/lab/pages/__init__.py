"""One file, one page: a module here that has a PAGE is found, served and tested."""

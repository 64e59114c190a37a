"""The command line: `forebay …` (entry point `forebay.cli.main:main`)."""

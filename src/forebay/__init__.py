"""Forebay: KV cache blocks of LLM inference on flash, read straight from an NVMe-oF target."""

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"

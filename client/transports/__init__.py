"""Ways to the bytes of a volume, behind one interface (`base.Transport`)."""

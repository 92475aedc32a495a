"""Files on disk and in object stores: paths, listing, reading, writing, local copies, locks."""

"""The schemas that the installed libraries declare, and the catalog's files of them."""

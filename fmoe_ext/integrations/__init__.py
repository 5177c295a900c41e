"""fmoe_ext in other libraries, each imported only when its module here is used."""

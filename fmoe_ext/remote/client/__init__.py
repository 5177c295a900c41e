"""The client side: modules that train through experts elsewhere. remote/__init__.py shows the path of a call."""

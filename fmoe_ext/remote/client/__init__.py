"""The client side: modules that train through experts on other machines. remote/__init__.py shows a call's way."""

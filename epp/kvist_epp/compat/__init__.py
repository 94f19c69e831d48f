"""Other routers' configuration, translated to the settings of this picker."""

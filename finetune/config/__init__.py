"""Settings: their names, defaults and rules, and how files and flags become them. Nothing here
imports torch, looks at a device, or knows how a run is carried out.
"""

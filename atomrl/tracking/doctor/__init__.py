"""The run says how it is: rules over its metrics, in plain words, each with a page in docs/guides/troubleshooting/."""

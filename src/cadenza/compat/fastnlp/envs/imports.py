"""``fastNLP.envs.imports``: the frameworks in use. Cadenza trains with torch."""

SUPPORT_BACKENDS = ["torch"]
"""The frameworks."""

_NEED_IMPORT_TORCH = True
_NEED_IMPORT_PADDLE = _NEED_IMPORT_JITTOR = _NEED_IMPORT_ONEFLOW = False

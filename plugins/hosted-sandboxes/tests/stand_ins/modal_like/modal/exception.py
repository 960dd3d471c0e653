"""Errors of modal 1.6 that hone tells apart."""


class Error(Exception):
    pass


class ResourceExhaustedError(Error):
    pass


class ServiceError(Error):
    pass


class ExecTimeoutError(Error):
    pass

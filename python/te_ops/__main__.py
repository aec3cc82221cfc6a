from ._info import report

print(report())

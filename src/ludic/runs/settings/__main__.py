from ludic.runs.settings import RunConfig
from ludic.runs.settings.reference import reference_table

print(reference_table(RunConfig))

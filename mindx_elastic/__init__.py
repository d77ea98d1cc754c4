from mindx_elastic import data
from mindx_elastic.guard import Guard

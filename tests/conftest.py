"Tests need no network and no data but the embedded set; what they cache goes to a folder of their own, and what they print has room, however wide the terminal."
import os, sys, tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(FEDBOOK_DATA=tempfile.mkdtemp(prefix='fedbook-test-'), FEDBOOK_OFFLINE='1', HF_HUB_OFFLINE='1', TQDM_DISABLE='1', OMP_NUM_THREADS='1', COLUMNS='200')

import torch
torch.set_num_threads(1)

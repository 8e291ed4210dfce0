import sys; sys.path.insert(0,'/work/main')
import tests.test_docs as t, threading, time, asyncio, logging
orig=t.Serving.__init__
def init(self,*a):
    orig(self,*a)
    def dump():
        time.sleep(5)
        for task in asyncio.all_tasks(self._loop):
            print("TASK", task.get_name()); task.print_stack(file=sys.stdout)
    threading.Thread(target=dump,daemon=True).start()
t.Serving.__init__=init
logging.basicConfig(level=logging.DEBUG,filename="/tmp/dbg.log")
from tests.test_docs import *
_old=t.PAPERS
def dump2():
    time.sleep(9)
    import faulthandler; faulthandler.dump_traceback(file=open('/tmp/fh.txt','w'))
threading.Thread(target=dump2,daemon=True).start()

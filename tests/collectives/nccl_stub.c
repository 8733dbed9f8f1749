/* A libnccl.so.2 for nccl4py to load, whose calls are in progress as a non-blocking communicator's are: what they make is
   written to where it was asked for by a later look at the communicator, as NCCL 2.30's sources have it. */
#include <stddef.h>
#include <string.h>

typedef struct {
  char bytes[128];
} UniqueId;

static void** asked_for[8];
static int looks, wanted;

static int in_progress(void** result) {
  *result = NULL;
  asked_for[wanted++] = result;
  looks = 0;
  return 7;
}

int ncclGetVersion(int* version) {
  *version = 23203;
  return 0;
}

const char* ncclGetErrorString(int result) { return result == 6 ? "the peer is gone" : "no error"; }

const char* ncclGetLastError(void* comm) { return "last words"; }

int ncclGetUniqueId(UniqueId* id) {
  memset(id, 5, sizeof *id);
  return 0;
}

int ncclCommInitRankConfig(void** comm, int size, UniqueId id, int rank, void* config) {
  if (id.bytes[0] != 5 || id.bytes[127] != 5) return 4;
  *comm = &looks; /* at once, though the communicator is not there yet */
  looks = 0;
  return 7;
}

int ncclCommSplit(void* comm, int color, int key, void** child, void* config) {
  if (color == -1) {
    *child = NULL;
    return 7;
  }
  return in_progress(child);
}

int ncclCommWindowRegister(void* comm, void* buffer, size_t size, void** window, int flags) {
  return in_progress(window);
}

int ncclCommGetAsyncError(void* comm, int* state) {
  *state = ++looks < 3 ? 7 : 0;
  while (*state == 0 && wanted) {
    wanted--;
    *asked_for[wanted] = asked_for + wanted;
  }
  return comm == NULL ? 4 : 0;
}

int ncclAllReduce(const void* x, void* out, size_t count, int type, int op, void* comm, void* stream) {
  return count == 99 ? 6 : 7;
}

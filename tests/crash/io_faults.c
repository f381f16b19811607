/* Faults of system calls, for the tests of what the core does about them: a library to be loaded
 * before libc (LD_PRELOAD). The core that is tested is the one that ships; nothing in it knows of this.
 *
 * A rule names a call, the end of the file's path, and which of the matching calls fail: with an
 * errno, after a part of the bytes, or not at all though nothing was done. test_io_faults.py sets
 * rules through ctypes in the process that trains. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

enum { kPretend = -1, kRulesMax = 16 };

struct rule {
  char call[16], suffix[64];
  long first, last;    /* of the matching calls, from 1 */
  int error;           /* errno; 0: `bytes` bytes are done; kPretend: none, and success is returned */
  long bytes;
  long last_offset;    /* only after a pwrite at most there; -1: always */
  long seen;
};
static struct rule rules[kRulesMax];
static int num_rules;
static long newest_offset = -1;

int io_fault(const char* call, const char* suffix, long first, long last, int error, long bytes,
             long last_offset) {
  if (num_rules == kRulesMax) return -1;
  struct rule* r = &rules[num_rules];
  memset(r, 0, sizeof *r);
  strncpy(r->call, call, sizeof r->call - 1);
  strncpy(r->suffix, suffix, sizeof r->suffix - 1);
  r->first = first;
  r->last = last;
  r->error = error;
  r->bytes = bytes;
  r->last_offset = last_offset;
  return __atomic_fetch_add(&num_rules, 1, __ATOMIC_SEQ_CST);
}

void io_faults_clear(void) { __atomic_store_n(&num_rules, 0, __ATOMIC_SEQ_CST); }

long io_fault_seen(int rule) { return __atomic_load_n(&rules[rule].seen, __ATOMIC_SEQ_CST); }

static int ends_with(const char* text, const char* end) {
  size_t n = strlen(text), m = strlen(end);
  return n >= m && strcmp(text + n - m, end) == 0;
}

static void path_of_fd(int fd, char* path, size_t bytes) {
  char link[32];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, bytes - 1);
  path[n > 0 ? n : 0] = '\0';
}

static void path_of_address(const void* address, char* path, size_t bytes) {
  FILE* maps = fopen("/proc/self/maps", "re");
  char line[1024];
  path[0] = '\0';
  while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
    unsigned long begin, end;
    int name = 0;
    if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %n", &begin, &end, &name) < 2) continue;
    if ((uintptr_t)address < begin || (uintptr_t)address >= end) continue;
    snprintf(path, bytes, "%s", line + name);
    path[strcspn(path, "\n")] = '\0';
  }
  if (maps != NULL) fclose(maps);
}

/* The rule that this call breaks by, or NULL. */
static const struct rule* broken(const char* call, int fd, const void* address) {
  const struct rule* found = NULL;
  int before = errno, count = __atomic_load_n(&num_rules, __ATOMIC_SEQ_CST);
  char path[1024] = "";
  for (int i = 0; i < count; ++i) {
    struct rule* r = &rules[i];
    if (strcmp(r->call, call) != 0) continue;
    if (path[0] == '\0' && address != NULL) path_of_address(address, path, sizeof path);
    if (path[0] == '\0' && address == NULL) path_of_fd(fd, path, sizeof path);
    if (!ends_with(path, r->suffix)) continue;
    if (r->last_offset >= 0 && __atomic_load_n(&newest_offset, __ATOMIC_SEQ_CST) > r->last_offset)
      continue;
    long number = __atomic_add_fetch(&r->seen, 1, __ATOMIC_SEQ_CST);
    if (number >= r->first && number <= r->last) found = r;
  }
  errno = before;
  return found;
}

/* What a broken call returns in the caller's place. */
#define RETURN_BROKEN(found_rule, failed, succeeded)     \
  do {                                                  \
    const struct rule* the_rule = (found_rule);           \
    if (the_rule != NULL) {                             \
      if (the_rule->error == kPretend) return succeeded; \
      errno = the_rule->error;                          \
      return failed;                                    \
    }                                                   \
  } while (0)

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fdatasync(int fd) {
  RETURN_BROKEN(broken("fdatasync", fd, NULL), -1, 0);
  return REAL(fdatasync)(fd);
}

int fsync(int fd) {
  RETURN_BROKEN(broken("fsync", fd, NULL), -1, 0);
  return REAL(fsync)(fd);
}

int msync(void* address, size_t bytes, int flags) {
  RETURN_BROKEN(broken("msync", -1, address), -1, 0);
  return REAL(msync)(address, bytes, flags);
}

int posix_fallocate(int fd, off_t offset, off_t bytes) {
  const struct rule* r = broken("fallocate", fd, NULL);
  if (r != NULL) return r->error == kPretend ? 0 : r->error; /* it does not set errno */
  return REAL(posix_fallocate)(fd, offset, bytes);
}

int ftruncate(int fd, off_t bytes) {
  RETURN_BROKEN(broken("ftruncate", fd, NULL), -1, 0);
  return REAL(ftruncate)(fd, bytes);
}

void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fd >= 0) RETURN_BROKEN(broken("mmap", fd, NULL), MAP_FAILED, MAP_FAILED);
  return REAL(mmap)(address, bytes, protection, flags, fd, offset);
}

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  const struct rule* r = broken("pwrite", fd, NULL);
  if (r != NULL && r->error == 0) bytes = (size_t)r->bytes < bytes ? (size_t)r->bytes : bytes;
  if (r != NULL && r->error != 0) RETURN_BROKEN(r, -1, (ssize_t)bytes);
  __atomic_store_n(&newest_offset, (long)offset, __ATOMIC_SEQ_CST);
  return REAL(pwrite)(fd, from, bytes, offset);
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  const struct rule* r = broken("pread", fd, NULL);
  if (r != NULL && r->error == 0) bytes = (size_t)r->bytes < bytes ? (size_t)r->bytes : bytes;
  if (r != NULL && r->error != 0) RETURN_BROKEN(r, -1, (ssize_t)bytes);
  return REAL(pread)(fd, to, bytes, offset);
}

/* Names of the same calls in programs that were compiled for files of any size. */
int posix_fallocate64(int fd, off_t offset, off_t bytes) {
  return posix_fallocate(fd, offset, bytes);
}
int ftruncate64(int fd, off_t bytes) { return ftruncate(fd, bytes); }
void* mmap64(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return mmap(address, bytes, protection, flags, fd, offset);
}
ssize_t pwrite64(int fd, const void* from, size_t bytes, off_t offset) {
  return pwrite(fd, from, bytes, offset);
}
ssize_t pread64(int fd, void* to, size_t bytes, off_t offset) {
  return pread(fd, to, bytes, offset);
}

/* A disk that a power cut empties of whatever was not flushed, for the process that preloads this library.

   Of every file below POWER_CUT_ROOT, POWER_CUT_IMAGE/data-INODE is its content when it was last flushed; of every
   folder, POWER_CUT_IMAGE/names-INODE lists what lay in it when it was last flushed: inode, kind and name.
   `tests/power_cut.py` makes the tree of them that a machine finds when its power comes back. The rule is the strictest
   that POSIX allows: a name that is made, replaced or removed is not on the disk before its folder is flushed. Threads
   may flush at once, and the process may stand still at any moment: what was kept before is replaced whole. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t one_keeps = PTHREAD_MUTEX_INITIALIZER;

static int flush(const char *name, int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    return real(fd);
}

static void keep_data(int fd, const char *target) {
    char from[64], piece[1 << 16];
    snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    int source = open(from, O_RDONLY | O_CLOEXEC), copy = open(target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (source < 0 || copy < 0) abort();
    for (ssize_t count; (count = read(source, piece, sizeof piece)) > 0;)
        if (write(copy, piece, count) != count) abort();
    close(source);
    close(copy);
}

static void keep_names(const char *folder, const char *target) {
    FILE *list = fopen(target, "w");
    DIR *open_folder = opendir(folder);
    if (!list || !open_folder) abort();
    for (struct dirent *entry; (entry = readdir(open_folder));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            fprintf(list, "%llu %c %s\n", (unsigned long long)entry->d_ino, entry->d_type == DT_DIR ? 'd' : 'f',
                    entry->d_name);
    closedir(open_folder);
    fclose(list);
}

/* An inode that came back as the other kind is no longer what it was. */
static void forget(const char *image, const char *kind, unsigned long long inode) {
    char target[PATH_MAX];
    snprintf(target, sizeof target, "%s/%s-%llu", image, kind, inode);
    unlink(target);
}

static void keep(int fd) {
    const char *root = getenv("POWER_CUT_ROOT"), *image = getenv("POWER_CUT_IMAGE");
    char link[64], path[PATH_MAX], target[PATH_MAX], whole[PATH_MAX];
    struct stat found;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (!root || !image || length < 0 || fstat(fd, &found)) return;
    path[length] = 0;
    if (strncmp(path, root, strlen(root))) return;
    int is_folder = S_ISDIR(found.st_mode);
    snprintf(target, sizeof target, "%s/%s-%llu", image, is_folder ? "names" : "data", (unsigned long long)found.st_ino);
    snprintf(whole, sizeof whole, "%s/being-kept", image);
    pthread_mutex_lock(&one_keeps);
    forget(image, is_folder ? "data" : "names", (unsigned long long)found.st_ino);
    is_folder ? keep_names(path, whole) : keep_data(fd, whole);
    if (rename(whole, target)) abort();
    pthread_mutex_unlock(&one_keeps);
}

int fsync(int fd) {
    int result = flush("fsync", fd);
    if (!result) keep(fd);
    return result;
}

int fdatasync(int fd) {
    int result = flush("fdatasync", fd);
    if (!result) keep(fd);
    return result;
}

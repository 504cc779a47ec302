// A file system that shows a folder as a server far away would: each call waits, some fail.
//
// Usage: slow FOLDER MOUNT [options of libfuse]
//
// Every operation waits `user.delay` microseconds before it is done; operations may wait side by
// side. With `user.fail` N, about each Nth fails, in turn with ESTALE, EIO and EINTR. `user.calls`
// is how many there were. With `user.lockstep` 1 they wait for one another and not for a time: once
// no thread of who asks runs, all that wait are done, which is one turn. `user.turns` is how many
// there were: so many round trips would one who has all the processors that he wants wait for. With
// `user.nolinks` 1 a hard link ends with EIO, as in a mount of rclone. All are extended attributes
// of the mount's root, which wait for nothing. There is no fallocate, no O_DIRECT at open, no
// sharing of blocks and no search for holes, times are of whole seconds, and nothing tells of a
// change of the folder itself.
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int lower;
static atomic_long calls, delay_us = 1000, fail_every, lockstep, turns, no_links;

static const char *const NAMES[] = {"user.calls",    "user.delay", "user.fail",
                                    "user.lockstep", "user.turns", "user.nolinks"};
static atomic_long *const NUMBERS[] = {&calls, &delay_us, &fail_every, &lockstep, &turns, &no_links};
enum { NUMBERS_COUNT = sizeof NUMBERS / sizeof *NUMBERS };

static pthread_mutex_t waiting = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t next_turn = PTHREAD_COND_INITIALIZER;
static long waiters;
static pid_t client;

static void pause_for(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&time, NULL);
}

// Whether a thread of the process that `thread` belongs to is in one of these states (proc(5)).
static int any_is(pid_t thread, const char *states) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/task", thread);
    DIR *tasks = opendir(path);
    if (tasks == NULL) return 0;
    int found = 0;
    for (struct dirent *entry; !found && (entry = readdir(tasks)) != NULL;) {
        pid_t task = (pid_t)atol(entry->d_name);
        if (task == 0 || task == gettid()) continue;
        snprintf(path, sizeof path, "/proc/%d/task/%d/stat", thread, task);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t size = file == -1 ? -1 : read(file, line, sizeof line - 1);
        if (file != -1) close(file);
        if (size <= 0) continue;
        line[size] = '\0';
        char *name = strrchr(line, ')');
        found = name != NULL && name[1] == ' ' && strchr(states, name[2]) != NULL;
    }
    closedir(tasks);
    return found;
}

// Whether whoever asked has nothing left to do before an answer, and no answer is under way. A
// thread that waits for its processor runs, by this. Who waits for another disk does not: then a
// turn more is counted, and never one less.
static int all_wait(pid_t who) { return !any_is(who, "R") && !any_is(getpid(), "RD"); }

static void *take_turns(void *unused) {
    for (;;) {
        pause_for(200);
        pthread_mutex_lock(&waiting);
        long before = waiters;
        pid_t who = client;
        pthread_mutex_unlock(&waiting);
        if (before == 0 || !all_wait(who)) continue;
        pause_for(100);
        if (!all_wait(who)) continue;
        pthread_mutex_lock(&waiting);
        if (waiters == before) {
            turns++;
            waiters = 0;
            pthread_cond_broadcast(&next_turn);
        }
        pthread_mutex_unlock(&waiting);
    }
    return unused;
}

static void wait_for_turn(void) {
    pthread_mutex_lock(&waiting);
    client = fuse_get_context()->pid;
    waiters++;
    for (long now = turns; now == turns;) pthread_cond_wait(&next_turn, &waiting);
    pthread_mutex_unlock(&waiting);
}

// 0, or the error of this operation.
static int arrive(void) {
    long number = ++calls, every = fail_every, wait = delay_us;
    if (lockstep) wait_for_turn();
    if (wait > 0) pause_for(wait);
    static const int errors[] = {ESTALE, EIO, EINTR};
    return every > 0 && number % every == 0 ? -errors[number / every % 3] : 0;
}

#define ARRIVE                          \
    do {                                \
        int failed = arrive();          \
        if (failed != 0) return failed; \
    } while (0)

static int done(int result) { return result == -1 ? -errno : 0; }

// The path below the folder.
static const char *below(const char *path) { return path[1] == '\0' ? "." : path + 1; }

static void coarse(struct stat *status) {
    status->st_atim.tv_nsec = status->st_mtim.tv_nsec = status->st_ctim.tv_nsec = 0;
}

static int get_attributes(const char *path, struct stat *status, struct fuse_file_info *file) {
    ARRIVE;
    int result = file ? fstat((int)file->fh, status)
                      : fstatat(lower, below(path), status, AT_SYMLINK_NOFOLLOW);
    coarse(status);
    return done(result);
}

static int read_link(const char *path, char *text, size_t size) {
    ARRIVE;
    ssize_t length = readlinkat(lower, below(path), text, size - 1);
    if (length == -1) return -errno;
    text[length] = '\0';
    return 0;
}

static int make_directory(const char *path, mode_t mode) {
    ARRIVE;
    return done(mkdirat(lower, below(path), mode));
}

static int remove_file(const char *path) {
    ARRIVE;
    return done(unlinkat(lower, below(path), 0));
}

static int remove_directory(const char *path) {
    ARRIVE;
    return done(unlinkat(lower, below(path), AT_REMOVEDIR));
}

static int make_symlink(const char *text, const char *path) {
    ARRIVE;
    return done(symlinkat(text, lower, below(path)));
}

static int rename_file(const char *from, const char *to, unsigned flags) {
    ARRIVE;
    return done(renameat2(lower, below(from), lower, below(to), flags));
}

static int link_file(const char *from, const char *to) {
    ARRIVE;
    if (no_links) return -EIO;
    return done(linkat(lower, below(from), lower, below(to), 0));
}

static int set_mode(const char *path, mode_t mode, struct fuse_file_info *file) {
    ARRIVE;
    return done(file ? fchmod((int)file->fh, mode) : fchmodat(lower, below(path), mode, 0));
}

static int set_owner(const char *path, uid_t user, gid_t group, struct fuse_file_info *file) {
    ARRIVE;
    return done(file ? fchown((int)file->fh, user, group)
                     : fchownat(lower, below(path), user, group, AT_SYMLINK_NOFOLLOW));
}

static int set_size(const char *path, off_t size, struct fuse_file_info *file) {
    ARRIVE;
    if (file) return done(ftruncate((int)file->fh, size));
    int opened = openat(lower, below(path), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (opened == -1) return -errno;
    int result = done(ftruncate(opened, size));
    close(opened);
    return result;
}

static int set_times(const char *path, const struct timespec times[2],
                     struct fuse_file_info *file) {
    ARRIVE;
    struct timespec whole[2] = {times[0], times[1]};
    for (int i = 0; i < 2; i++) {
        if (whole[i].tv_nsec != UTIME_OMIT && whole[i].tv_nsec != UTIME_NOW) whole[i].tv_nsec = 0;
    }
    return done(file ? futimens((int)file->fh, whole)
                     : utimensat(lower, below(path), whole, AT_SYMLINK_NOFOLLOW));
}

static int opened(struct fuse_file_info *file, int descriptor) {
    if (descriptor == -1) return -errno;
    file->fh = (uint64_t)descriptor;
    return 0;
}

static int create_file(const char *path, mode_t mode, struct fuse_file_info *file) {
    ARRIVE;
    if (file->flags & O_DIRECT) return -EINVAL;
    return opened(file, openat(lower, below(path), file->flags | O_CLOEXEC, mode));
}

static int open_file(const char *path, struct fuse_file_info *file) {
    ARRIVE;
    if (file->flags & O_DIRECT) return -EINVAL;
    return opened(file, openat(lower, below(path), file->flags | O_CLOEXEC));
}

static int read_file(const char *path, char *data, size_t size, off_t offset,
                     struct fuse_file_info *file) {
    (void)path;
    ARRIVE;
    ssize_t count = pread((int)file->fh, data, size, offset);
    return count == -1 ? -errno : (int)count;
}

static int write_file(const char *path, const char *data, size_t size, off_t offset,
                      struct fuse_file_info *file) {
    (void)path;
    ARRIVE;
    ssize_t count = pwrite((int)file->fh, data, size, offset);
    return count == -1 ? -errno : (int)count;
}

static int sync_file(const char *path, int only_data, struct fuse_file_info *file) {
    (void)path;
    ARRIVE;
    return done(only_data ? fdatasync((int)file->fh) : fsync((int)file->fh));
}

static int release_file(const char *path, struct fuse_file_info *file) {
    (void)path;
    return done(close((int)file->fh));
}

static int sync_directory(const char *path, int only_data, struct fuse_file_info *file) {
    (void)only_data;
    (void)file;
    ARRIVE;
    int folder = openat(lower, below(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder == -1) return -errno;
    int result = done(fsync(folder));
    close(folder);
    return result;
}

static int list_directory(const char *path, void *names, fuse_fill_dir_t add, off_t offset,
                          struct fuse_file_info *file, enum fuse_readdir_flags flags) {
    (void)offset;
    (void)file;
    (void)flags;
    ARRIVE;
    int folder = openat(lower, below(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = folder == -1 ? NULL : fdopendir(folder);
    if (stream == NULL) return -errno;
    for (struct dirent *entry; (entry = readdir(stream)) != NULL;) {
        struct stat status = {.st_ino = entry->d_ino, .st_mode = (mode_t)entry->d_type << 12};
        if (add(names, entry->d_name, &status, 0, 0) != 0) break;
    }
    closedir(stream);
    return 0;
}

static int status_of_file_system(const char *path, struct statvfs *status) {
    (void)path;
    ARRIVE;
    int code = done(fstatvfs(lower, status));
    // As rclone's mount has it, which counts no inodes.
    status->f_files = 1000000000;
    status->f_ffree = status->f_favail = 0;
    return code;
}

static atomic_long *number_of(const char *path, const char *name) {
    for (int i = 0; i < NUMBERS_COUNT; i++) {
        if (strcmp(path, "/") == 0 && strcmp(name, NAMES[i]) == 0) return NUMBERS[i];
    }
    return NULL;
}

static int get_number(const char *path, const char *name, char *text, size_t size) {
    atomic_long *number = number_of(path, name);
    if (number == NULL) return -EOPNOTSUPP;
    char written[32];
    int length = snprintf(written, sizeof written, "%ld", *number);
    if (size == 0) return length;
    if (size < (size_t)length) return -ERANGE;
    memcpy(text, written, (size_t)length);
    return length;
}

static int set_number(const char *path, const char *name, const char *text, size_t size,
                      int flags) {
    (void)flags;
    atomic_long *number = number_of(path, name);
    char read[32] = "";
    if (number == NULL) return -EOPNOTSUPP;
    memcpy(read, text, size < sizeof read ? size : sizeof read - 1);
    *number = atol(read);
    return 0;
}

static void *begin(struct fuse_conn_info *connection, struct fuse_config *config) {
    connection->max_background = 64;
    config->use_ino = config->hard_remove = 1;
    config->attr_timeout = config->entry_timeout = 1;
    pthread_t taker;
    if (pthread_create(&taker, NULL, take_turns, NULL) != 0) abort();
    return NULL;
}

static const struct fuse_operations operations = {
    .init = begin,
    .getattr = get_attributes,
    .readlink = read_link,
    .mkdir = make_directory,
    .unlink = remove_file,
    .rmdir = remove_directory,
    .symlink = make_symlink,
    .rename = rename_file,
    .link = link_file,
    .chmod = set_mode,
    .chown = set_owner,
    .truncate = set_size,
    .utimens = set_times,
    .create = create_file,
    .open = open_file,
    .read = read_file,
    .write = write_file,
    .fsync = sync_file,
    .release = release_file,
    .fsyncdir = sync_directory,
    .readdir = list_directory,
    .statfs = status_of_file_system,
    .getxattr = get_number,
    .setxattr = set_number,
};

int main(int count, char **words) {
    if (count < 3) return 2;
    lower = open(words[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lower == -1) {
        perror(words[1]);
        return 1;
    }
    umask(0);
    words[1] = words[0];
    return fuse_main(count - 1, words + 1, &operations, NULL);
}

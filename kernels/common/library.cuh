// A shared library that is loaded when it is asked for, so that building needs neither its headers nor its stub.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>

class library {
  public:
    explicit library(const char * path) : path_(path), loaded_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (!loaded_) {
            fprintf(stderr, "%s cannot be loaded: %s\n", path, dlerror());
            exit(1);
        }
    }

    bool has(const char * name) const { return dlsym(loaded_, name) != nullptr; }

    // The function of that name, in the library or in what it is linked with.
    template <typename F> void find(F & function, const char * name) const {
        function = reinterpret_cast<F>(dlsym(loaded_, name));
        if (!function) {
            fprintf(stderr, "%s has no %s\n", path_.c_str(), name);
            exit(1);
        }
    }

  private:
    std::string path_;
    void *      loaded_;
};

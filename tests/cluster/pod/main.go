// What runs in the pods of the test cluster, without any file system: nothing at all, until it is told to stop; or, as
// `pod ask HOST:PORT [COUNT]`, callers that print what a server says to them, which is their own address for the lab's servers.
// `pod serve HOST:PORT...` is such a server.
package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] != "ask" && os.Args[1] != "serve" || len(os.Args) == 2 {
		fmt.Fprintln(os.Stderr, "usage: pod [ask HOST:PORT [COUNT] | serve HOST:PORT...]")
		os.Exit(2)
	}
	if len(os.Args) > 2 && os.Args[1] == "serve" {
		for _, address := range os.Args[2:] {
			listener, err := net.Listen("tcp", address)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			go serve(listener)
		}
		select {}
	}
	if len(os.Args) > 2 {
		count := 1
		if len(os.Args) > 3 {
			count, _ = strconv.Atoi(os.Args[3])
		}
		for range count {
			if err := ask(os.Args[2]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
		return
	}
	// As the first process of a pod it has everybody's orphans for children.
	c := make(chan os.Signal, 8)
	signal.Notify(c, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for s := range c {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

// Tells everybody who connects the address that he is seen with.
func serve(listener net.Listener) {
	for {
		c, err := listener.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		go func() {
			defer c.Close()
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			fmt.Fprintln(c, host)
		}()
	}
}

func ask(server string) error {
	c, err := net.DialTimeout("tcp", server, 5*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	answer, err := io.ReadAll(c)
	fmt.Print(string(answer))
	return err
}
